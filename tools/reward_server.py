"""Serve a reward function over HTTP, for runs with reward.remote.endpoints.

    python tools/reward_server.py --function configs/rewards/arithmetic.py:reward --port 8000

The function is called in worker processes, one response at a time each, and one that takes longer
than --timeout-seconds is killed and replaced. What is asked and answered is in docs/rewards.md. A
token that requests must bring is read from a variable of the environment. SIGTERM or SIGINT: what
is under way is answered, then the server ends with exit code 0.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, UserError

TOKEN_VARIABLE = "REWARD_SERVER_TOKEN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    from rlhf_megatron.rewards.pool import WorkerPool
    from rlhf_megatron.rewards.server import RewardServer

    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        pool = WorkerPool(
            options.function, workers=options.workers, timeout_seconds=options.timeout_seconds
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        server = RewardServer(
            pool,
            host=options.host,
            port=options.port,
            auth_token=os.environ.get(TOKEN_VARIABLE, ""),
        )
    except OSError as error:
        pool.close()
        print(f"error: --host {options.host} --port {options.port}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    server.start()
    print(f"serving {options.function} at {server.url}", flush=True)
    stop.wait()
    answered = server.stop(grace_seconds=options.grace_seconds)
    pool.close()
    print("stopped" if answered else "stopped with requests under way", flush=True)
    return EXIT_DONE if answered else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve a reward function over HTTP.",
        epilog=f"{TOKEN_VARIABLE} in the environment: the token that requests must bring.",
    )
    parser.add_argument(
        "--function", required=True, metavar="FILE:NAME", help="as in reward.function"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0: all networks (default: this machine alone)"
    )
    parser.add_argument("--workers", type=_at_least_one, default=4, help="processes (default: 4)")
    parser.add_argument(
        "--timeout-seconds", type=float, default=30.0, help="of one response (default: 30; 0: none)"
    )
    parser.add_argument(
        "--grace-seconds", type=float, default=30.0, help="for what is under way (default: 30)"
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for each request")
    return parser


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
