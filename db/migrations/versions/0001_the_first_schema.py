"""the first schema

Revision: 0001, the first.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("decoding", sa.String(length=8), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("mapping", sa.JSON(), nullable=False),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("data_key", sa.String(length=100), nullable=False),
        sa.Column("dedupe_key", sa.String(length=64), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("kv_share", sa.Float(), nullable=True),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_completed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_cancelled", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("dedupe_key", name=op.f("uq_jobs_dedupe_key")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_created_at", ["created_at"], unique=False)

    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("engine", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("exited_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("exit_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.create_index("ix_workers_model_heartbeat", ["model", "heartbeat_at"], unique=False)

    op.create_table(
        "requests",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=26), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.Column("payload", sa.Text(), nullable=True),
        sa.Column("sampling", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error_code", sa.String(length=40), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_requests_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
        sa.UniqueConstraint("job_id", "row_index", name=op.f("uq_requests_job_id_row_index")),
    )
    op.create_table(
        "shards",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=26), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("start_row", sa.BigInteger(), nullable=False),
        sa.Column("end_row", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("queue_key", sa.Float(precision=53), nullable=False),
        sa.Column("lease_owner", sa.String(length=26), nullable=True),
        sa.Column("lease_token", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_completed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_failed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_cancelled", sa.Integer(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shards")),
        sa.UniqueConstraint("job_id", "ordinal", name=op.f("uq_shards_job_id_ordinal")),
    )
    with op.batch_alter_table("shards", schema=None) as batch_op:
        batch_op.create_index(
            "ix_shards_leases",
            ["lease_owner", "lease_expires_at"],
            unique=False,
            sqlite_where=sa.text("state = 'leased'"),
            postgresql_where=sa.text("state = 'leased'"),
        )
        batch_op.create_index(
            "ix_shards_queue",
            ["model", "queue_key", "id"],
            unique=False,
            sqlite_where=sa.text("state = 'queued'"),
            postgresql_where=sa.text("state = 'queued'"),
        )

    op.create_table(
        "outputs",
        sa.Column("request_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_outputs_request_id_requests"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", "sample", name=op.f("pk_outputs")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "request_stats",
        sa.Column("request_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("threads", sa.Integer(), nullable=False),
        sa.Column("forks", sa.Integer(), nullable=False),
        sa.Column("max_width", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("peak_cached_tokens", sa.Integer(), nullable=False),
        sa.Column("peak_blocks", sa.Integer(), nullable=False),
        sa.Column("attended_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sequential_peak_tokens", sa.Integer(), nullable=False),
        sa.Column("sequential_attended_tokens", sa.BigInteger(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_request_stats_request_id_requests"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", "sample", name=op.f("pk_request_stats")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "thread_nodes",
        sa.Column("request_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("thread", sa.Integer(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_thread_nodes_request_id_requests"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", "sample", "node", name=op.f("pk_thread_nodes")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("thread_nodes")
    op.drop_table("request_stats")
    op.drop_table("outputs")
    with op.batch_alter_table("shards", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_shards_queue", sqlite_where=sa.text("state = 'queued'"), postgresql_where=sa.text("state = 'queued'")
        )
        batch_op.drop_index(
            "ix_shards_leases", sqlite_where=sa.text("state = 'leased'"), postgresql_where=sa.text("state = 'leased'")
        )

    op.drop_table("shards")
    op.drop_table("requests")
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.drop_index("ix_workers_model_heartbeat")

    op.drop_table("workers")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index("ix_jobs_created_at")

    op.drop_table("jobs")
