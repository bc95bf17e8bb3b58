"""Plots of results as SVG. Colours and fonts come from the page's style sheet, so that they follow its theme."""
