"""Acting together: one rank's failure is every rank's."""

from collections.abc import Callable

import torch.distributed as dist

from rlhf_megatron.errors import UserError


def together(action: Callable[[], None], *, group: dist.ProcessGroup, what: str) -> None:
    """Act, then agree: where any rank met a UserError or an error of the operating system (a full
    disk, no permission), all raise one UserError that names `what` and lists them. Also a barrier.
    """
    error = ""
    try:
        action()
    except (UserError, OSError) as failure:
        error = str(failure) or repr(failure)
    errors: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    if any(errors):
        raise UserError(f"{what}: " + "; ".join(dict.fromkeys(e for e in errors if e)))


def nothing() -> None:
    """What the other ranks do while one works."""
