"""Alembic's entry: migrate the connection that `Store.open` hands over, inside its transaction."""

from alembic import context

from nextstate.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
