"""find a tenant's open jobs

Every submit counts them, for the limits of the queue: without an index of their own it would read all that the tenant
ever had, on SQLite under the write lock.

Revision: 0009, after 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

OPEN = sa.text("state IN ('queued', 'running', 'cancelling')")


def upgrade() -> None:
    op.create_index("ix_jobs_open", "jobs", ["tenant"], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    op.drop_index("ix_jobs_open", table_name="jobs")
