"""Ablation of the refinements without instance optimisation, as in the paper's Table 2.

    python experiments/refinement/run.py ../shared/data/abdomen/val experiments/refinement/abdomen --labels 1,2,3,6,11
    python experiments/refinement/run.py ../shared/data/brain/val experiments/refinement/brain

A trained network is truncated after Ξθ, after Ψ1, after Ψ2 and, if it has one, after Ψ3; each part is evaluated on all
ordered pairs in the images' own space. The paper instead adds a refinement and trains further.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from carlreg.evaluation.api import evaluate
from carlreg.evaluation.scores import Scores
from carlreg.evaluation.sources import by_model
from carlreg.model.algorithms import Downsample, RegistrationAlgorithm, TwoStep
from carlreg.model.files import load, read_metadata, save
from carlreg.model.shipped import DEFAULT, WEIGHTS
from carlreg.paper_data import oasis

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine


def stages(model: RegistrationAlgorithm) -> dict[str, RegistrationAlgorithm]:
    """The network truncated after each step, shortest first; each part keeps its poolings."""
    if isinstance(model, Downsample):
        return {name: Downsample(inner, model.aligned) for name, inner in stages(model.phi).items()}
    if isinstance(model, TwoStep):
        before = stages(model.phi)
        return {**before, f"Ξ and {len(before)} Ψ": model}
    return {"Ξ alone": model}


def show(scores: Scores) -> None:
    print(scores.method, scores.pair, *scores.failures, f"{scores.figures['dice']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=WEIGHTS / f"{DEFAULT}.safetensors")
    parser.add_argument("--labels", default=",".join(str(label) for label in oasis.LABELS))
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    metadata = read_metadata(arguments.model)
    kept = {key: value for key, value in metadata.items() if key in ("grid", "ct_range")}  # how images are prepared
    labels = [int(word) for word in arguments.labels.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        methods = {}
        for number, (name, model) in enumerate(stages(load(arguments.model)).items()):
            path = Path(folder) / f"{number}.safetensors"
            save(model, path, metadata=kept)
            methods[name] = by_model(str(path), io_iterations=0, device=arguments.device)
        pairs = oasis.pairs(arguments.data)[: arguments.pairs]
        evaluation = evaluate(pairs, methods, labels=labels, done=show)
    evaluation.write(arguments.out, overwrite=True)
    about = {
        "commit": commit(),
        "machine": machine(),
        "device": arguments.device,
        "model": arguments.model.name,
    }
    (arguments.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    for method in evaluation.methods:
        print(method, evaluation.means(method))


if __name__ == "__main__":
    main()
