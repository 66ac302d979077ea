"""An application as they are found in the wild: a web-scraping backend whose tables are its queues.

Nothing in it is made for tests; all it is told, it is told by the environment.
"""
