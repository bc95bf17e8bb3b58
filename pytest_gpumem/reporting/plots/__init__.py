"""Drawings of results as inline SVG: colours and fonts come from the page's style sheet, so that they follow its theme."""
