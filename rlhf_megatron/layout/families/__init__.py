"""The registry of model families, by `model_type` of config.json: one file of rules each.

A new family is a new file here with a `FAMILY`; nothing else names it.
"""

from importlib import import_module
from pkgutil import iter_modules

from rlhf_megatron.layout.rules import Family

FAMILIES: dict[str, Family] = {}
for _found in sorted(iter_modules(__path__), key=lambda module: module.name):
    _family: Family = import_module(f"{__name__}.{_found.name}").FAMILY
    FAMILIES[_family.name] = _family
