"""What a batch job does around the training: where it runs, how it starts, what becomes of it.

The batch script runs outside any container, with whatever Python the cluster has: everything here
needs Python 3.9 and its standard library alone.
"""
