"""find a job's open shards

Whether a job is done is asked after every shard; without this index the question reads all the shards that are done.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OPEN = sa.text("state IN ('queued', 'leased')")


def upgrade() -> None:
    op.create_index("ix_shards_open", "shards", ["job_id"], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    op.drop_index("ix_shards_open", table_name="shards")
