"""Shows a plan, as text or as an HTML page.

In: a plan and its simulation. Out: text and HTML.
"""
