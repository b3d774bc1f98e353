"""What may be wrong with the machines, before a run finds out: facts of each rank and node are
gathered, checks judge them, and one table says go or no-go. docs/doctor.md."""
