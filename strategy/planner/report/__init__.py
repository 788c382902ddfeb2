"""Shows a plan: in lines of text, or as a page.

In: a plan and its simulation. Out: text and HTML.
"""
