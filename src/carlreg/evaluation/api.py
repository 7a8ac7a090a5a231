"""How good registrations are, of whatever method: transforms in, figures out.

Everything is measured in the fixed image's own space: labels are warped onto the fixed grid taking the nearest voxel,
distances are millimetres, determinants those of the map between the two worlds. A method is a function that makes of a
pair a `Result`; results of other programs come in by their files.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.evaluation.scores import FIGURES, Scores, score
from carlreg.evaluation.sources import Method, _absolute
from carlreg.evaluation.statistics import _mean, _number, sign_flip_test
from carlreg.files.atomic import write_atomically
from carlreg.files.images import PathLike
from carlreg.files.tables import Pair

HIGHER_IS_BETTER = ("dice",)


# ---- many pairs -----------------------------------------------------------------------------------------------------


@dataclass
class Evaluation:
    """Scores of one or more methods on the same pairs."""

    scores: list[Scores]
    names: Mapping[int, str] = field(default_factory=dict)
    """What the labels are called."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(scores.method for scores in self.scores))

    @property
    def labels(self) -> list[int]:
        return sorted({label for scores in self.scores for label in scores.dice})

    def of(self, method: str) -> list[Scores]:
        return [scores for scores in self.scores if scores.method == method]

    def means(self, method: str) -> dict[str, float]:
        """The mean over the pairs that have the figure."""
        rows = self.of(method)
        return {key: _mean([scores.figures[key] for scores in rows]) for key in FIGURES}

    def label_name(self, label: int) -> str:
        return self.names.get(label, str(label))

    def dice_of(self, method: str, label: int) -> list[float]:
        return [scores.dice[label] for scores in self.of(method) if not math.isnan(scores.dice.get(label, math.nan))]

    def compare(self, first: str, second: str, figure: str = "dice") -> dict[str, Any]:
        """First minus second on the pairs that both have: mean, 95 % interval, p, and how many pairs the first wins.

        The interval is a bootstrap over pairs; p is a two-sided test that flips the signs of the differences.
        """
        values = [{s.pair: s.figures[figure] for s in self.of(method)} for method in (first, second)]
        common = [pair for pair in values[0] if pair in values[1]]
        differences = np.array([values[0][pair] - values[1][pair] for pair in common])
        differences = differences[np.isfinite(differences)]
        told: dict[str, Any] = {"first": first, "second": second, "figure": figure, "pairs": len(differences)}
        if not len(differences):
            return told
        rng = np.random.default_rng(0)
        drawn = rng.choice(differences, (10_000, len(differences))).mean(axis=1)
        sign = 1 if figure in HIGHER_IS_BETTER else -1
        return told | {
            "mean_difference": float(differences.mean()),
            "interval": [float(x) for x in np.percentile(drawn, [2.5, 97.5])],
            "p": sign_flip_test(differences),
            "won": int((sign * differences > 0).sum()),
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """Every later method against every earlier one, in Dice and in landmark error, where there are any."""
        found = [
            self.compare(second, first, figure)
            for figure in ("dice", "tre_mm")
            for i, first in enumerate(self.methods)
            for second in self.methods[i + 1 :]
        ]
        return [row for row in found if row["pairs"]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "methods": {
                method: {
                    "pairs": len(self.of(method)),
                    "failed": sum(bool(scores.failures) for scores in self.of(method)),
                    **{key: _number(value) for key, value in self.means(method).items()},
                    "dice_per_label": {
                        self.label_name(label): _number(_mean(self.dice_of(method, label))) for label in self.labels
                    },
                }
                for method in self.methods
            },
            "comparisons": self.comparisons(),
            "scores": [scores.as_dict() for scores in self.scores],
        }

    def to_csv(self) -> str:
        """A row for each pair and method, a column for each figure and label."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        kinds = [(kind, label) for kind in ("dice", "hd95_mm") for label in self.labels]
        header = [f"{kind}_{self.label_name(label)}" for kind, label in kinds]
        writer.writerow(["method", "pair", *FIGURES, *header, "failures"])
        for scores in self.scores:
            cells = [scores.figures[key] for key in FIGURES]
            cells += [getattr(scores, kind).get(label, math.nan) for kind, label in kinds]
            written = ["" if math.isnan(value) else f"{value:.6g}" for value in cells]
            writer.writerow([scores.method, scores.pair, *written, "; ".join(scores.failures)])
        return text.getvalue()

    def write(self, folder: PathLike, *, overwrite: bool = False) -> Path:
        """Write `scores.csv`, `scores.json` and, where matplotlib is installed and there are labels, `dice.png`."""
        target = Path(folder)
        taken = [name for name in ("scores.csv", "scores.json", "dice.png") if (target / name).exists()]
        if taken and not overwrite:
            raise FileExistsError(f"{target} already holds {taken[0]}; choose another folder, or --overwrite")
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / "scores.csv", self.to_csv().encode())
        write_atomically(target / "scores.json", (json.dumps(self.as_dict(), indent=2) + "\n").encode())
        if self.labels:
            try:
                picture = self.box_plot()
            except ImportError:
                return target
            write_atomically(target / "dice.png", picture)
        return target

    def box_plot(self) -> bytes:
        """Dice per structure, a box for each method, as the paper's appendix has it: a PNG."""
        from matplotlib.figure import Figure

        count = len(self.methods)
        width = 2 + 0.35 * len(self.labels) * (count + 0.5)
        figure = Figure(figsize=(min(max(width, 7), 14), 4), layout="constrained")
        axes = figure.subplots()
        for number, method in enumerate(self.methods):
            places = [place * (count + 1) + number for place in range(len(self.labels))]
            boxes = axes.boxplot(
                [self.dice_of(method, label) for label in self.labels],
                positions=places,
                widths=0.8,
                patch_artist=True,
                medianprops={"color": "black"},
                flierprops={"markersize": 3},
            )
            for box in boxes["boxes"]:
                box.set_facecolor(f"C{number}")
            axes.plot([], [], "s", color=f"C{number}", label=method)
        middle = [place * (count + 1) + (count - 1) / 2 for place in range(len(self.labels))]
        axes.set_xticks(middle, [self.label_name(label) for label in self.labels], rotation=45, ha="right")
        axes.set(ylabel="Dice", ylim=(0, 1))
        figure.legend(loc="outside upper center", ncols=3)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def evaluate(
    pairs: Sequence[Pair],
    methods: Mapping[str, Method],
    *,
    labels: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    partial: bool = False,
    done: Callable[[Scores], None] = lambda scores: None,
) -> Evaluation:
    """Measure each method on each pair; see `score`. A pair that is listed again fails and is not measured again.

    `done` is called with each pair's scores as they come.

    >>> evaluation = evaluate(read_pairs("pairs.csv"), {"before": identity, "carl": in_folder("results")})
    >>> evaluation.write("figures")
    """
    found = []
    for method_name, method in methods.items():
        for pair, again in _with_repeats(pairs):
            if again:
                scores = Scores(method_name, pair.name, failures=["the pair is listed twice; expected each once"])
            else:
                scores = score(pair, method, name=method_name, labels=labels, partial=partial)
            found.append(scores)
            done(scores)
    return Evaluation(found, names or {})


def _with_repeats(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, bool]]:
    seen = set()
    for pair in pairs:
        key = (_absolute(pair.fixed), _absolute(pair.moving))
        yield pair, key in seen
        seen.add(key)


def adapter(name: str) -> Any:
    """The module of a dataset that has pairs to evaluate on."""
    if name not in DATASETS:
        raise ValueError(f"no dataset {name!r}; expected one of {', '.join(DATASETS)}")
    return importlib.import_module(f"carlreg.paper_data.{name}")


DATASETS = ("abdomen1k", "copdgene", "dirlab", "hcp", "learn2reg", "oasis")
"""Of `carlreg.datasets`, those that have `pairs`."""
