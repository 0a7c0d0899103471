"""What `outrider report` is made of: sections that each stand alone, how they run, and the file that they become."""
