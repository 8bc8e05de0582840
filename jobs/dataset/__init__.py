"""From a job's answers to a data set that is trained on: filters, duplicates, a split, the formats that trainers read.

Receives the result batches of `jobs.export`; hands on files and the counts of every step. The steps are pure, each in a
file of its own; `pipeline` puts them in a row.
"""
