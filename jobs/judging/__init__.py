"""`forq judge`: answers in a file become prompts for a judge, its verdicts a table and a report.

In: a Parquet file of answers and a rubric. Out: a folder with the prompts, one job per judge in the service, the judged
table (`results.parquet`) and the report. Items (`items`) become prompts (`prompts`), a job answers them (`run`), its
replies are read (`verdicts`, `probabilities`) into the table (`table`) and added up (`statistics`, `report`).
"""
