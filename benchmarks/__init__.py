"""How fast this machine trains and scores, each figure beside what it is compared with, in one run.

`run` conducts the parts and returns one row; `worker` is the process in which one contestant is checked for
exactness, warmed up and timed; `sizes` says what is measured how large; `report` renders the row.
"""
