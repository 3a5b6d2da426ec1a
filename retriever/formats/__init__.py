"""The bytes of a file to (title, text), a module for each family of formats. Knows nothing about paths.

A parser raises DocumentError where there is nothing to read, and may raise anything for a damaged file. The title is ""
where there is none. All but plain text and JSON give Markdown.
"""
