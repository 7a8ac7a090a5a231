"""Generate docs/api.md, the reference of the Python library, from its docstrings.

    python docs/api.py

`make docs` does so before it builds the website.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import carlreg
from carlreg.files import images, transform_files, world_transform

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """# Python reference

`docs/api.py` generates this page from the docstrings. The [library guide](library.md) shows how the parts fit together,
the [tutorial](tutorial.md#python) how to register two scans, and [conventions](conventions.md) what coordinates mean.
"""
SECTIONS = {
    "Register scans": ("register", "Registration"),
    "Models": ("pretrained", "load", "save", "carl", "carl_rot", "gradicon", "xi", "add_refinement"),
    "Transforms": ("Transform", "Identity", "Affine", "DisplacementField", "Composition", "compose", "invert", "warp"),
    "Algorithms": (
        *("RegistrationAlgorithm", "TwoStep", "Downsample", "PredictDisplacement", "CoordinateAttention"),
        *("ClosedFormXi", "Augmented", "coordinate_attention", "attention_moments", "mixed_precision"),
    ),
    "Losses and optimisation": (
        *("registration_loss", "Loss", "lncc", "lncc2", "mind", "ssd", "diffusion"),
        *("optimize_fields", "Optimized", "instance_optimize"),
    ),
    "Training": ("train", "Stage"),
}
FILES = {
    "carlreg.files.images": [images.Image, images.read, images.write, images.from_array],
    "carlreg.files.transform_files": [transform_files.read, transform_files.write],
    "carlreg.files.world_transform": [world_transform.WorldTransform, world_transform.apply],
}
"""Parts of the package that users of `register` meet."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, names in sections().items():
        things = ((f"carlreg.{name}", getattr(carlreg, name)) for name in names)
        parts += [f"## {title}\n", *(text for name, thing in things for text in entry(name, thing))]
    parts.append("## Files\n")
    for module, members in FILES.items():
        parts += [text for one in members for text in entry(f"{module}.{one.__name__}", one)]
    return "\n".join(parts)


def sections() -> dict[str, tuple[str, ...]]:
    """Every public name, by section."""
    listed = {name for names in SECTIONS.values() for name in names}
    return SECTIONS | {"Groups and more": tuple(name for name in carlreg.__all__ if name not in listed)}


def entry(name: str, thing: Any) -> Iterator[str]:
    """A heading, the signature, the docstring, and for a class its public methods and properties."""
    yield f"### {name.rpartition('.')[2]}\n"
    yield f"```text\n{name}{signature(thing)}\n```\n"
    yield description(thing)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, classmethod | property)):
                continue
            function = value.fget if isinstance(value, property) else getattr(thing, member)
            bound = isinstance(value, classmethod)
            call = "" if isinstance(value, property) else signature(function, method=not bound)
            text = description(function).partition("\n\n")[0].replace("\n", " ")
            yield f"- `{member}{call}`: {text}".rstrip(": ") + "\n"


def signature(thing: Any, *, method: bool = False) -> str:
    """The signature without types, which the docstring states, on lines of at most 100 characters."""
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except ValueError:
        return ""
    shown = [one.replace(annotation=inspect.Parameter.empty) for one in parameters[method:]]
    text = str(inspect.Signature([one.replace(default=_plain(one)) for one in shown]))
    text = re.sub(r"'(<[^']*>)'", r"\1", text)
    return text if len(text) < 100 or method else "(\n    " + text[1:-1].replace(", ", ",\n    ") + ",\n)"


def _plain(parameter: inspect.Parameter) -> Any:
    """The default, if it reads the same on every machine."""
    default = parameter.default
    if default is inspect.Parameter.empty or isinstance(default, (str, int, float, bool, tuple, type(None))):
        return default
    return "<default>"


def description(thing: Any) -> str:
    """A docstring as a paragraph: names in backticks as they are, the examples as code."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        text = ""  # what dataclasses write themselves
    prose, mark, example = text.partition("\n>>> ")
    prose = prose.replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
    return prose + ("\n" if prose else "") + (f"\n```text\n>>> {example}\n```\n" if mark else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
