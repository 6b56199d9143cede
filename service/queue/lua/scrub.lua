-- job
scrub(ARGV[2], CANCELLED)
return {'ok'}
