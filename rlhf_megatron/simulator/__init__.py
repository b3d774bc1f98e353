"""What a step would take: its phases as tasks on ranks, with durations from rates.

cluster.py (the machine and its rates) -> costs.py (seconds of each phase) -> steps.py (tasks of a
step) -> schedule.py (who waits for whom). calibrate.py takes rates from a run, search.py tries
placements. Integers and floats only: no torch.distributed, no processes.
"""
