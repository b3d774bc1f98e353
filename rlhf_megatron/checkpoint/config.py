"""Options of what a run keeps on disk."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ExportConfig:
    """The model written at the end of a run."""

    final: bool = True
    """Write the trained actor to RUN/hf at the end, as a Hugging Face directory. Default true."""
