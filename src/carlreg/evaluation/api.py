"""Evaluate registrations of any method: transforms in, figures out.

Everything is measured in the fixed image's own space: labels are warped onto the fixed grid by nearest neighbour,
distances are millimetres, determinants those of the map between the two worlds. A method is a function from a pair to a
`Result`; results of other programs are read from their files.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carlreg.evaluation.scores import FIGURES, Scores, score
from carlreg.evaluation.sources import Method, image_files
from carlreg.evaluation.statistics import Comparison, compare, mean, or_none
from carlreg.files.atomic import write_together
from carlreg.files.images import PathLike
from carlreg.files.tables import Pair
from carlreg.paper_data.dataset import PLAIN, Dataset

SCORES = "scores.json"
OUTPUTS = (SCORES, "scores.csv", "dice.png")


@dataclass(frozen=True)
class Evaluation:
    """Scores of one or more methods on the same pairs."""

    scores: list[Scores]
    names: Mapping[int, str] = field(default_factory=dict)
    """The names of labels."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(scores.method for scores in self.scores))

    @property
    def labels(self) -> list[int]:
        return sorted({label for scores in self.scores for label in scores.dice})

    def of(self, method: str) -> list[Scores]:
        return [scores for scores in self.scores if scores.method == method]

    def means(self, method: str) -> dict[str, float]:
        """The mean of each figure over the pairs that have it."""
        return {key: mean([scores.figures[key] for scores in self.of(method)]) for key in FIGURES}

    def label_name(self, label: int) -> str:
        return self.names.get(label, str(label))

    def dice_of(self, method: str, label: int) -> list[float]:
        return [scores.dice[label] for scores in self.of(method) if not math.isnan(scores.dice.get(label, math.nan))]

    def compare(self, first: str, second: str, figure: str = "dice") -> Comparison | None:
        """The first method minus the second on the pairs that both have, if there are any."""
        values = {one.pair: one.figures[figure] for one in self.of(second)}
        differences = (one.figures[figure] - values[one.pair] for one in self.of(first) if one.pair in values)
        return compare(first, second, figure, differences)

    def comparisons(self) -> list[Comparison]:
        """Every later method against every earlier one, in Dice and in landmark error."""
        pairs = list(itertools.combinations(self.methods, 2))
        rows = [self.compare(b, a, figure) for figure in ("dice", "tre_mm") for a, b in pairs]
        return [row for row in rows if row is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {
            "methods": {method: self._summary(method) for method in self.methods},
            "comparisons": [asdict(row) for row in self.comparisons()],
            "scores": [scores.as_dict() for scores in self.scores],
        }

    def _summary(self, method: str) -> dict[str, Any]:
        return {
            "pairs": len(self.of(method)),
            "failed": sum(bool(scores.failures) for scores in self.of(method)),
            **{key: or_none(value) for key, value in self.means(method).items()},
            "dice_per_label": {self.label_name(n): or_none(mean(self.dice_of(method, n))) for n in self.labels},
        }

    def to_csv(self) -> str:
        """A row for each pair and method, a column for each figure and label."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        kinds = [(kind, label) for kind in ("dice", "hd95_mm") for label in self.labels]
        header = [f"{kind}_{self.label_name(label)}" for kind, label in kinds]
        writer.writerow(["method", "pair", *FIGURES, *header, "failures"])
        for scores in self.scores:
            values = [scores.figures[key] for key in FIGURES]
            values += [getattr(scores, kind).get(label, math.nan) for kind, label in kinds]
            cells = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
            writer.writerow([scores.method, scores.pair, *cells, "; ".join(scores.failures)])
        return text.getvalue()

    def write(self, folder: PathLike, *, overwrite: bool = False) -> Path:
        """Write `scores.csv`, `scores.json` and, with labels and if matplotlib is installed, `dice.png`."""
        with write_together(folder, OUTPUTS, last=SCORES, overwrite=overwrite) as staging:
            (staging / "scores.csv").write_text(self.to_csv(), encoding="utf-8")
            (staging / SCORES).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
            if self.labels:
                with contextlib.suppress(ImportError):
                    (staging / "dice.png").write_bytes(box_plot(self))
        return Path(folder)


def evaluate(
    pairs: Sequence[Pair],
    methods: Mapping[str, Method],
    *,
    labels: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    partial: bool = False,
    dataset: Dataset = PLAIN,
    done: Callable[[Scores], None] = lambda scores: None,
) -> Evaluation:
    """Measure each method on each pair; see `score`. A pair that is listed again fails and is not measured again.

    `done` is called with the scores of each pair as soon as they are complete.

    >>> evaluation = evaluate(read_pairs("pairs.csv"), {"before": identity, "carl": in_folder("results")})
    >>> evaluation.write("figures")
    """
    results = []
    for name, method in methods.items():
        measured = set()
        for pair in pairs:
            if image_files(pair) in measured:
                results.append(Scores(name, pair.name, failures=["the pair is listed twice; expected each once"]))
            else:
                results.append(score(pair, method, name=name, labels=labels, partial=partial, dataset=dataset))
            measured.add(image_files(pair))
            done(results[-1])
    return Evaluation(results, names or {})


def box_plot(evaluation: Evaluation) -> bytes:
    """Dice per structure, a box for each method, as in the paper's appendix: a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    labels, count = evaluation.labels, len(evaluation.methods)
    width = 2 + 0.35 * len(labels) * (count + 0.5)
    figure = Figure(figsize=(min(max(width, 7), 14), 4), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(evaluation.methods):
        boxes = axes.boxplot(
            [evaluation.dice_of(method, label) for label in labels],
            positions=[group * (count + 1) + number for group in range(len(labels))],
            widths=0.8,
            patch_artist=True,
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(f"C{number}")
        axes.plot([], [], "s", color=f"C{number}", label=method)
    centres = [group * (count + 1) + (count - 1) / 2 for group in range(len(labels))]
    axes.set_xticks(centres, [evaluation.label_name(label) for label in labels], rotation=45, ha="right")
    axes.set(ylabel="Dice", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
