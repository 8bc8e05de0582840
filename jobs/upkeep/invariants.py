"""What must hold between the tables, each as SQL that yields an `example` per violation.

One statement a check, so that it sees one moment of a database that goes on working. None reads a text, and none needs
memory that grows with the rows: they walk keys in order, and what must be sorted the database sorts on disk.
"""

_NAMES = {
    "shard": "s.job_id || ' rows ' || s.start_row || '-' || (s.end_row - 1)",
    "row": "(SELECT q.job_id || ' row ' || q.row_index FROM requests q WHERE q.id = t.request_id)",
}
FRAGMENTS = {
    "sqlite": {
        **_NAMES,
        "ago": "strftime('%Y-%m-%d %H:%M:%f000', 'now', -:seconds || ' seconds')",
        "shard_requests": "LEFT JOIN requests r ON r.job_id = s.job_id AND r.row_index >= s.start_row "
        "AND r.row_index < s.end_row",
        "num_samples": "coalesce(json_extract(r.sampling, '$.n'), json_extract(j.sampling, '$.n'), 1)",
    },
    "postgresql": {
        **_NAMES,
        "ago": "(clock_timestamp() - make_interval(secs => :seconds))",
        # OFFSET 0 keeps the planner from making it a join of all requests of a job with all its shards.
        "shard_requests": "LEFT JOIN LATERAL (SELECT id, state FROM requests r WHERE r.job_id = s.job_id "
        "AND r.row_index >= s.start_row AND r.row_index < s.end_row OFFSET 0) r ON true",
        "num_samples": "coalesce((r.sampling::json ->> 'n')::int, (j.sampling ->> 'n')::int, 1)",
    },
}
"""What the two databases say differently. A LEFT JOIN from shards to requests also keeps SQLite from turning it round:
each shard looks up its own rows by the key (job_id, row_index)."""

SHARDS_TILE = """
SELECT job_id AS example FROM (
  SELECT s.job_id, s.start_row, s.end_row,
    lag(s.end_row) OVER by_ordinal AS before,
    lead(s.start_row) OVER by_ordinal AS behind,
    j.num_rows
  FROM shards s JOIN jobs j ON j.id = s.job_id
  WINDOW by_ordinal AS (PARTITION BY s.job_id ORDER BY s.ordinal)
) AS shards_in_order
WHERE start_row <> coalesce(before, 0) OR end_row <> coalesce(behind, num_rows) OR end_row <= start_row
UNION
SELECT j.id FROM jobs j WHERE j.num_rows > 0 AND NOT EXISTS (SELECT 1 FROM shards s WHERE s.job_id = j.id)
"""

ROWS_ARE_THERE = """
SELECT j.id AS example
FROM jobs j LEFT JOIN (
  SELECT job_id, count(*) AS num, min(row_index) AS low, max(row_index) AS high FROM requests GROUP BY job_id
) r ON r.job_id = j.id
WHERE coalesce(r.num, 0) <> j.num_rows OR r.low <> 0 OR r.high <> j.num_rows - 1
"""

COUNTERS_ARE_THE_ROWS = """
SELECT {shard} AS example
FROM shards s {shard_requests}
GROUP BY s.id
HAVING s.num_completed <> count(CASE WHEN r.state = 'completed' THEN 1 END)
  OR s.num_failed <> count(CASE WHEN r.state = 'failed' THEN 1 END)
  OR s.num_cancelled <> count(CASE WHEN r.state = 'cancelled' THEN 1 END)
"""

TOKENS_ARE_THE_ANSWERS = """
SELECT {shard} AS example
FROM shards s {shard_requests} LEFT JOIN outputs o ON o.request_id = r.id
GROUP BY s.id
HAVING s.output_tokens <> coalesce(sum(o.output_tokens), 0)
"""

ENDED_SHARDS_ARE_WHOLE = """
SELECT {shard} AS example FROM shards s
WHERE s.state IN ('done', 'cancelled') AND s.num_completed + s.num_failed + s.num_cancelled <> s.end_row - s.start_row
"""

TOTALS_ARE_THE_SHARDS = """
SELECT j.id AS example
FROM jobs j LEFT JOIN (
  SELECT job_id, sum(num_completed) AS completed, sum(num_failed) AS failed, sum(num_cancelled) AS cancelled,
    sum(output_tokens) AS tokens, count(CASE WHEN state IN ('queued', 'leased') THEN 1 END) AS num_open
  FROM shards GROUP BY job_id
) s ON s.job_id = j.id
WHERE j.state IN ('completed', 'failed', 'cancelled') AND (
  j.num_completed <> coalesce(s.completed, 0) OR j.num_failed <> coalesce(s.failed, 0)
  OR j.num_cancelled <> coalesce(s.cancelled, 0) OR j.output_tokens <> coalesce(s.tokens, 0)
  OR coalesce(s.num_open, 0) > 0 OR j.finished_at IS NULL
)
"""

SAMPLES_ARE_COMPLETE = """
SELECT r.job_id || ' row ' || r.row_index AS example
FROM requests r JOIN jobs j ON j.id = r.job_id
WHERE (SELECT count(*) FROM outputs o WHERE o.request_id = r.id)
  <> CASE WHEN r.state = 'completed' THEN {num_samples} ELSE 0 END
"""

ANSWERS_HAVE_STATISTICS = """
SELECT r.job_id AS example
FROM requests r JOIN outputs o ON o.request_id = r.id
LEFT JOIN request_stats s ON s.request_id = o.request_id AND s.sample = o.sample
GROUP BY r.job_id
HAVING count(s.request_id) NOT IN (0, count(*))
"""

STATISTICS_HAVE_ANSWERS = """
SELECT {row} AS example
FROM request_stats t LEFT JOIN outputs o ON o.request_id = t.request_id AND o.sample = t.sample
WHERE o.request_id IS NULL
"""

STATISTICS_HAVE_TREES = """
SELECT {row} AS example
FROM request_stats t
WHERE NOT EXISTS (SELECT 1 FROM thread_nodes n WHERE n.request_id = t.request_id AND n.sample = t.sample)
"""

NODES_TILE = """
SELECT {row} AS example FROM thread_nodes t LEFT JOIN thread_nodes before
  ON before.request_id = t.request_id AND before.sample = t.sample AND before.node = t.node - 1
WHERE t.start <> coalesce(before."end", 0) OR t."end" < t.start
UNION ALL
SELECT {row} FROM (
  SELECT request_id, sample, max("end") AS "end" FROM thread_nodes GROUP BY request_id, sample
) AS t LEFT JOIN outputs o ON o.request_id = t.request_id AND o.sample = t.sample
WHERE t."end" <> coalesce(o.output_tokens, -1)
"""

JOBS_HAVE_ENDED = """
SELECT j.id AS example FROM jobs j
WHERE j.state IN ('queued', 'running')
  AND NOT EXISTS (SELECT 1 FROM shards s WHERE s.job_id = j.id AND s.state IN ('queued', 'leased'))
"""

CANCELLED_JOBS_HAVE_ENDED = """
SELECT j.id AS example FROM jobs j
WHERE j.state = 'cancelling' AND NOT EXISTS (SELECT 1 FROM shards s WHERE s.job_id = j.id AND s.state = 'leased')
"""

LEASES_ARE_WHOLE = """
SELECT {shard} AS example FROM shards s
WHERE (s.state = 'leased') <> (s.lease_owner IS NOT NULL) OR (s.state = 'leased') <> (s.lease_expires_at IS NOT NULL)
"""

LEASES_ARE_FRESH = """
SELECT {shard} AS example FROM shards s WHERE s.state = 'leased' AND s.lease_expires_at < {ago}
"""

OWNERS_LIVE = """
SELECT {shard} AS example
FROM shards s JOIN workers w ON w.id = s.lease_owner
WHERE s.state = 'leased' AND w.exited_at IS NOT NULL
"""

EVENTS_ARE_SENT = """
SELECT d.event_id AS example
FROM webhook_deliveries d JOIN webhooks w ON w.id = d.webhook_id
WHERE d.state = 'pending' AND d.attempts = 0 AND d.next_attempt_at < {ago} AND w.state = 'active' AND NOT EXISTS (
  SELECT 1 FROM webhook_deliveries e
  WHERE e.webhook_id = d.webhook_id AND e.job_id = d.job_id AND e.id < d.id AND e.state = 'pending'
)
"""

WORKERS_HAVE_A_PULSE = """
SELECT w.id || ' on ' || w.host AS example FROM workers w WHERE w.exited_at IS NULL AND w.heartbeat_at < {ago}
"""

BATCHES_GO_ON = """
SELECT b.id AS example FROM batches b LEFT JOIN jobs j ON j.id = b.job_id
WHERE (b.state = 'validating' AND b.created_at < {ago})
  OR (b.state IN ('in_progress', 'finalizing', 'cancelling') AND (j.id IS NULL OR j.finished_at < {ago}))
"""

BATCHES_HAVE_THEIR_FILES = """
SELECT b.id AS example FROM batches b
WHERE b.totals IS NOT NULL AND (b.output_file_id IS NULL AND b.error_file_id IS NULL)
  OR b.state IN ('completed', 'expired') AND b.totals IS NULL AND b.in_progress_at IS NOT NULL
"""
