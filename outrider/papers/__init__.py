"""Methods of papers that are off by default. The table of drafters, `outrider.engine.drafters`, alone imports them."""
