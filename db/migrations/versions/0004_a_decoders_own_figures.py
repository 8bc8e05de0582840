"""a decoder's own figures

What the reference backend counts of its drafting. Answers of vLLM, and all that were stored so far, have none: nulls.

Revision: 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COUNTS = ("forwards", "draft_nodes", "verify_nodes")
SHARES = ("hit_rate", "acceptance_length", "decoding_efficiency")


def upgrade() -> None:
    for name in COUNTS:
        op.add_column("request_stats", sa.Column(name, sa.Integer(), nullable=True))
    for name in SHARES:
        op.add_column("request_stats", sa.Column(name, sa.Float(), nullable=True))


def downgrade() -> None:
    for name in reversed(COUNTS + SHARES):
        op.drop_column("request_stats", name)
