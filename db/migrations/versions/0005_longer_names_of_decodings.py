"""longer names of decodings

`apar+medusa` does not fit into 8 characters. The way back cuts names that do not fit; the schema before this one knows
`ar` and `apar` only.

Revision: 0005, after 0004.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _resize(8, 16)


def downgrade() -> None:
    op.execute("UPDATE jobs SET decoding = substr(decoding, 1, 8) WHERE length(decoding) > 8")
    _resize(16, 8)


def _resize(before: int, after: int) -> None:
    # On SQLite this makes a new table, copies the rows and drops the old one: see migrations/env.py on foreign keys.
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column(
            "decoding",
            existing_type=sa.String(length=before),
            type_=sa.String(length=after),
            existing_nullable=False,
        )
