"""``groupnorm info``: what was built, what runs, and what is beside it."""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec

import groupnorm
from groupnorm.cli.usage import Json, console, print_json

_FRAMEWORKS = ("torch", "jax", "flax", "onnxruntime", "openvino", "triton", "diffusers")


def info(as_json: Json = False) -> None:
    """Version, build, instruction sets, backends and why not the others, threads, frameworks.

    \b
    Example: groupnorm info --json
    """
    found = groupnorm.info()
    frameworks = {name: _version(name) for name in _FRAMEWORKS}
    if as_json:
        print_json({**asdict(found), "frameworks": frameworks})
        return
    out = console()
    out.print(str(found), markup=False)
    out.print("frameworks:", markup=False)
    for name, version in frameworks.items():
        out.print(f"  {name} {version or 'not installed'}", markup=False)


def _version(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown version"
