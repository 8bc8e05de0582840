"""The REST edge: HTTP requests in, calls to `jobs` out. It receives uploads and questions, and hands on job rows to SQL
and results to the client; it decides nothing about a job's life itself.
"""
