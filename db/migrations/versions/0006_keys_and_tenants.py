"""keys and tenants

Keys of the REST API, and whose a job is. What is stored so far belongs to the tenant `default`; the same content may
now be a job of each tenant. The way back forgets the keys and whose the jobs are, so whoever reaches the API then sees
all of them.

Revision: 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

from db.clock import UtcDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("rate_per_minute", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("expires_at", UtcDateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", UtcDateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", UtcDateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    # On SQLite this makes a new table, copies the rows and drops the old one: see migrations/env.py on foreign keys.
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("tenant", sa.String(length=63), server_default="default", nullable=False))
        jobs.drop_constraint(op.f("uq_jobs_dedupe_key"), type_="unique")
        jobs.create_unique_constraint(op.f("uq_jobs_tenant_dedupe_key"), ["tenant", "dedupe_key"])
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant", "id"])


def downgrade() -> None:
    # Content of two tenants would be one job again: the constraint comes back for the default tenant's alone.
    op.execute("UPDATE jobs SET dedupe_key = NULL WHERE tenant <> 'default'")
    op.drop_index("ix_jobs_tenant_id", table_name="jobs")
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint(op.f("uq_jobs_tenant_dedupe_key"), type_="unique")
        jobs.drop_column("tenant")
        jobs.create_unique_constraint(op.f("uq_jobs_dedupe_key"), ["dedupe_key"])
    op.drop_table("api_keys")
