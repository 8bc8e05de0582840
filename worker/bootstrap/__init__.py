"""From an instruction model to one that forks, without any data set: the model's own answers teach it where to.

Stages, each a file or folder in OUT that appears when it is whole, so that a run stopped anywhere is taken up there:
answers (`answering`, through our own service) → selection (`selecting`) and trees (`apar.extraction`) → training
(`apar.training`) → report (`apar.evaluation`).
"""
