-- worker: it ends
redis.call('ZREM', key('worker_seen'), ARGV[2])
redis.call('HDEL', key('workers'), ARGV[2])
return 1
