"""The tables and figures of Leviathan, Kalman and Matias (2023) on our pairs: what is measured, stored, and written."""
