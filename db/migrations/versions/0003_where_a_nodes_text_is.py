"""where a node's text is

A node's span counts tokens, the stored output is text: without the span in characters, a tree cannot show what each of
its nodes says. Answers stored so far have one node over the whole output.

Revision: 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("thread_nodes", sa.Column("text_start", sa.Integer(), server_default="0", nullable=False))
    op.add_column("thread_nodes", sa.Column("text_end", sa.Integer(), server_default="0", nullable=False))
    op.execute(
        """
        UPDATE thread_nodes SET text_end = (
            SELECT length(outputs.text) FROM outputs
            WHERE outputs.request_id = thread_nodes.request_id AND outputs.sample = thread_nodes.sample
        )
        WHERE EXISTS (
            SELECT 1 FROM outputs
            WHERE outputs.request_id = thread_nodes.request_id AND outputs.sample = thread_nodes.sample
        )
        """
    )


def downgrade() -> None:
    op.drop_column("thread_nodes", "text_end")
    op.drop_column("thread_nodes", "text_start")
