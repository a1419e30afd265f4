"""`relevo limit`: the highest rate of requests at which a server keeps its promises.

options     what was asked for, checked
load        the requests of a run: lengths, classes of work, when each is due
lengths     where lengths come from: fitted generators, traces, conversations, ranges
mix         the file that mixes classes of work
prompts     texts of so many tokens that share nothing with those of another run
exchange    one streamed answer over HTTP/1.1
generator   the process that sends requests when they are due, whatever the server does
dispatch    starts that process and reads what it tells
children    how processes that were started come to their end
asking      short questions to it before it is measured
endpoint    the server that is asked: what it serves and what it can be asked for
own_server  the server that is started where none was named
scrapes     what a server tells of itself while it is measured
runs        one run, as a value: what each request saw, and whether it held
over_http   runs against a server
simulated   the same in virtual time, without a model
search      the rates that are tried, from runs alone
statistics  the limit and its interval from runs at several rates
summary     from runs to figures
surroundings  what they were measured on: settings, and the machine that sends
remarks     what must be known beside the figures
watch       what is told while it goes on, for programs
policies    the limit under several policies
words       the figures on a terminal
against     two results side by side
report      a result as a page that needs nothing else; report_charts its pictures, report_tune what tuning tried
telling     lines and files of a result
tune        better settings for the same targets, from beginning to end, with
            tune_controls    the settings that are turned, and their steps
            tune_candidates  settings that are tried, and what is known of them
            tune_search      what is tried, from runs alone
            tune_confirm     what was found, measured again under fresh seeds
            tune_admin       what is asked of its operator side
            tune_live        the settings of a server while it is tuned, and how they come back
            tune_http, tune_simulated, tune_result, tune_words
command     all of it in order
"""
