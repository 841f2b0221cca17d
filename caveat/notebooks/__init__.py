"""How objects look in a notebook: small HTML tables in the page's own colours.

Called by the `_repr_html_` of posteriors, infos, predictions and scores.
"""

from caveat.notebooks.html_tables import facts_html, notes_html, table_html

__all__ = ["facts_html", "notes_html", "table_html"]
