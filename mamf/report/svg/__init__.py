"""Pictures for pages: the charts of mamf.report.charts as SVG. Colors are classes that a page's style sheet defines."""
