"""batches, recipes and turns

The files and batches of the OpenAI-compatible API, a job's recipe, and what an answer may bring besides its text: the
turns before it, log probabilities, the prompt tokens that the engine's prefix cache served.

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op

from db.clock import UtcDateTime

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_STAMPS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("data_key", sa.String(length=100), nullable=False),
        sa.Column("created_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("expires_at", UtcDateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant", "id"])
    op.create_index(op.f("ix_files_data_key"), "files", ["data_key"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("job_id", sa.String(length=26), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("input_file_id", sa.String(length=40), nullable=False),
        sa.Column("endpoint", sa.String(length=40), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=True),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("output_file_id", sa.String(length=40), nullable=True),
        sa.Column("error_file_id", sa.String(length=40), nullable=True),
        sa.Column("totals", sa.JSON(), nullable=True),
        sa.Column("claimed_by", sa.String(length=26), nullable=True),
        sa.Column("claimed_until", UtcDateTime(timezone=True), nullable=True),
        sa.Column("created_at", UtcDateTime(timezone=True), nullable=False),
        sa.Column("expires_at", UtcDateTime(timezone=True), nullable=False),
        *(sa.Column(name, UtcDateTime(timezone=True), nullable=True) for name in _STAMPS),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_batches_job_id_jobs"), ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_tenant_id", "batches", ["tenant", "id"])
    op.create_index(op.f("ix_batches_job_id"), "batches", ["job_id"])
    op.create_index(op.f("ix_batches_fingerprint"), "batches", ["fingerprint"])
    is_open = sa.text("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')")
    op.create_index("ix_batches_open", "batches", ["id"], sqlite_where=is_open, postgresql_where=is_open)
    op.add_column("jobs", sa.Column("recipe", sa.Text(), nullable=True))
    for column in (
        sa.Column("turns", sa.Text(), nullable=True),
        sa.Column("logprobs", sa.Text(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
    ):
        op.add_column("outputs", column)


def downgrade() -> None:
    for name in ("cached_tokens", "logprobs", "turns"):
        op.drop_column("outputs", name)
    op.drop_column("jobs", "recipe")
    op.drop_table("batches")
    op.drop_table("files")
