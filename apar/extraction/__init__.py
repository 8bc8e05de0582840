"""Extraction: finished answers to paragraph trees for training, and back.

`extract` reads one answer, `extract_file` a Parquet file of them. Every tree's nodes are spans of the answer, so that
`restore` gives it back byte for byte.
"""

from apar.extraction.extract import extract
from apar.extraction.files import extract_file
from apar.extraction.options import Extraction, Options, Rules
from apar.extraction.report import Report
from apar.extraction.structure import TreeError, TreeNode, restore, verify

__all__ = [
    "Extraction",
    "Options",
    "Report",
    "Rules",
    "TreeError",
    "TreeNode",
    "extract",
    "extract_file",
    "restore",
    "verify",
]
