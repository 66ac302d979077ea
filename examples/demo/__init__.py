"""A host application and its workers, killed, starved, redeployed and frozen before your eyes.

`make demo` runs it. The application's side is invoice, database, application, worker and leak; the
rest stages what happens to it, and watches.
"""
