from database_fixtures import database, database_url, postgresql_server, templates

__all__ = ["database", "database_url", "postgresql_server", "templates"]
