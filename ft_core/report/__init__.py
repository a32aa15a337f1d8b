"""`ft-report`: reads the events of a job and says where every second went.

`reader` reads the files, `story` says what each group did when, `failures` what went wrong and why, `account` adds up;
`text`, `picture` and `page` show it, `cli` is the command. docs/report.md is the description for users.
"""
