"""Errors that are shown without a traceback, and the exit codes of the command lines."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED_RESUMABLE = 3


class UserError(ValueError):
    """Bad usage, configuration or input: shown as one message without a traceback, exit code 2.

    The message names the key or file, its value, the rule it breaks and the way out.
    """


class JobError(RuntimeError):
    """What all ranks have found alike, with rank, phase and cause in its message: shown as one
    message without a traceback, exit code 1."""


class ConfigError(UserError):
    """Every problem found in a configuration, one line each; a single one is the whole message."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            listed = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"configuration: {len(self.problems)} problems{listed}")
