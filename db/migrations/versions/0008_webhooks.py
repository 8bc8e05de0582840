"""webhooks

Addresses that are told of jobs' states, and the outbox of what they are still to be told.

Revision: 0008, after 0007.
"""

import sqlalchemy as sa
from alembic import op

from db.clock import UtcDateTime

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("every_job", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("secret", sa.String(length=100), nullable=False),
        sa.Column("old_secret", sa.String(length=100), nullable=True),
        sa.Column("old_secret_until", UtcDateTime(timezone=True), nullable=True),
        sa.Column("num_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("resume_at", UtcDateTime(timezone=True), nullable=True),
        sa.Column("created_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("removed_at", UtcDateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index(op.f("ix_webhooks_tenant"), "webhooks", ["tenant"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("event_id", sa.String(length=30), nullable=False),
        sa.Column("webhook_id", sa.String(length=26), nullable=False),
        sa.Column("job_id", sa.String(length=26), nullable=True),
        sa.Column("type", sa.String(length=40), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("created_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", UtcDateTime(timezone=True), nullable=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_webhook_deliveries_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_deliveries_webhook_id_webhooks"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("event_id", "webhook_id", name=op.f("uq_webhook_deliveries_event_id_webhook_id")),
    )
    pending = sa.text("state = 'pending'")
    op.create_index(
        "ix_webhook_deliveries_due", "webhook_deliveries", ["next_attempt_at"],
        sqlite_where=pending, postgresql_where=pending,
    )  # fmt: skip
    op.create_index("ix_webhook_deliveries_job_id", "webhook_deliveries", ["job_id"])
    op.create_index("ix_webhook_deliveries_webhook_id_job_id", "webhook_deliveries", ["webhook_id", "job_id"])
    op.add_column("jobs", sa.Column("webhook_id", sa.String(length=26), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "webhook_id")
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
