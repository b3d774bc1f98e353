"""The folder that the run writes to, and the files that it reads."""

from collections.abc import Iterator

from rlhf_megatron.doctor.facts import (
    FolderFacts,
    JobFacts,
    NodeFacts,
    gigabytes,
    grouped,
    nodes_in_words,
)
from rlhf_megatron.doctor.report import Finding, good, note, red, warning

LONG_WRITE_SECONDS = 600.0
"""Without an expectation, a checkpoint that takes longer to write warns."""


def check_storage(job: JobFacts) -> Iterator[Finding]:
    """All of them; without a configuration there is no folder and no file to look at."""
    yield from _files(job)
    yield from _tokenizer(job)
    seen = [(node, node.folder) for node in job.nodes if node.folder is not None]
    if not seen:
        return
    yield from _writable(seen, job=job)
    usable = [folder for _, folder in seen if not folder.problem]
    if usable:
        yield from _space(usable[0], job=job)
        yield from _speed([folder for folder in usable if folder.write_bytes_per_second], job=job)


def _files(job: JobFacts) -> Iterator[Finding]:
    keys = list(dict.fromkeys(file.key for node in job.nodes for file in node.files))
    found: list[Finding] = []
    for key in keys:
        seen = [(node, file) for node in job.nodes for file in node.files if file.key == key]
        for problem, pairs in grouped(seen, by=lambda pair: pair[1].problem).items():
            if problem:
                found.append(
                    red(
                        key,
                        f"{problem} (on {nodes_in_words([node for node, _ in pairs])})",
                        expected="readable on every node",
                        way_out="put it on a disk that all nodes see, or copy it to the same path "
                        "on each; check its permissions",
                    )
                )
        sound = [(node, file) for node, file in seen if not file.problem]
        contents = grouped(sound, by=lambda pair: pair[1].fingerprint)
        if len(contents) > 1:
            parts = [
                f"{gigabytes(pairs[0][1].num_bytes)} on {nodes_in_words([n for n, _ in pairs])}"
                for pairs in contents.values()
            ]
            found.append(
                red(
                    key,
                    f"{sound[0][1].path} differs between nodes: {'; '.join(parts)}",
                    expected="the same on every node",
                    way_out="copy it anew to all of them, or put it on a disk that all nodes see",
                )
            )
    yield from found
    if keys and not found:
        total = sum(file.num_bytes for file in job.nodes[0].files)
        nodes = "" if len(job.nodes) == 1 else f" on all {len(job.nodes)} nodes"
        yield good("input files", f"{', '.join(keys)} readable{nodes}, {gigabytes(total)}")


def _tokenizer(job: JobFacts) -> Iterator[Finding]:
    tried = [node for node in job.nodes if node.tokenizer_problem is not None]
    broken = grouped(
        [node for node in tried if node.tokenizer_problem], by=lambda node: node.tokenizer_problem
    )
    for problem, nodes in broken.items():
        yield red(
            "tokenizer",
            f"{problem} (on {nodes_in_words(nodes)})",
            expected="loads",
            way_out="give data.tokenizer a Hugging Face directory or a sentencepiece .model file",
        )
    if tried and not broken:
        yield good("tokenizer", "loads")


def _writable(seen: list[tuple[NodeFacts, FolderFacts]], *, job: JobFacts) -> Iterator[Finding]:
    for problem, pairs in grouped(seen, by=lambda pair: pair[1].problem).items():
        if problem:
            yield red(
                "run.output_dir",
                f"{problem} (on {nodes_in_words([node for node, _ in pairs])})",
                expected="writable on every node",
                way_out="give run.output_dir a folder that this user may write to",
            )
    apart = [node for node, folder in seen if not folder.problem and not folder.is_shared]
    if apart:
        yield red(
            "run.output_dir",
            f"{seen[0][1].path}: what rank 0 writes there is not seen on {nodes_in_words(apart)}",
            expected="one folder for all nodes: checkpoints are written by all of them",
            way_out="give run.output_dir a folder on a shared file system",
        )
    if not apart and not any(folder.problem for _, folder in seen):
        shared = f", and shared by all {len(seen)} nodes" if len(seen) > 1 else ""
        yield good("run.output_dir", f"{seen[0][1].path}: writable{shared}")


def _space(folder: FolderFacts, *, job: JobFacts) -> Iterator[Finding]:
    """A new checkpoint is complete before an old one goes."""
    needs = job.needs
    if needs.checkpoint_bytes == 0:
        yield note("disk space", f"{gigabytes(folder.free_bytes)} free under {folder.path}")
        return
    one = needs.checkpoint_bytes
    first = one + needs.export_bytes
    all_of_them = max(needs.max_checkpoints * one + needs.export_bytes, first)
    still_needed = max(all_of_them - folder.checkpoint_bytes, first)
    found = f"{gigabytes(folder.free_bytes)} free under {folder.path}"
    if folder.checkpoint_bytes:
        found += f", beside {gigabytes(folder.checkpoint_bytes)} of checkpoints"
    expected = (
        f"{gigabytes(still_needed)}: {needs.max_checkpoints} checkpoints of {gigabytes(one)} at "
        f"once (checkpoint.keep_last + 1), {gigabytes(needs.export_bytes)} of exports"
    )
    if folder.free_bytes < still_needed:
        yield red(
            "disk space",
            found,
            expected=expected,
            way_out="free some, give another run.output_dir, or lower checkpoint.keep_last",
        )
    else:
        yield good("disk space", found, expected)


def _speed(folders: list[FolderFacts], *, job: JobFacts) -> Iterator[Finding]:
    if not folders:
        return
    speed = sum(folder.write_bytes_per_second or 0.0 for folder in folders)
    found = f"{speed / 1e9:.2f} GB/s, {len(folders)} node{'s' * (len(folders) > 1)} at once"
    seconds = job.needs.checkpoint_bytes / speed
    if job.needs.checkpoint_bytes:
        found += f": {seconds:.0f} s for a checkpoint of {gigabytes(job.needs.checkpoint_bytes)}"
    wanted = job.needs.config.checkpoint_write_gb_per_second
    way_out = (
        "give run.output_dir a faster file system, or save less often (checkpoint.interval_minutes)"
    )
    if wanted and speed / 1e9 < wanted:
        expected = f"{wanted:g} GB/s (doctor.checkpoint_write_gb_per_second)"
        yield red("write speed", found, expected=expected, way_out=way_out)
    elif not wanted and seconds > LONG_WRITE_SECONDS:
        expected = f"at most {LONG_WRITE_SECONDS:.0f} s for a checkpoint"
        yield warning("write speed", found, expected=expected, way_out=way_out)
    elif wanted:
        yield good("write speed", found, f"{wanted:g} GB/s (doctor.checkpoint_write_gb_per_second)")
    else:
        yield good("write speed", found)
