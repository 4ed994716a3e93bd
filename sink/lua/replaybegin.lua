-- Finds or creates the note of a replay. A second caller finds the note of the first.
-- KEYS note. ARGV restart ("1"), ms to live, then fields and values of a new note; the first field is run.
-- Answers {old run or '', field, value…}: the note there is now, and the run that was given up for it.
local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1
local old = redis.call('HGET', KEYS[1], 'run') or ''
if old == '' or ARGV[1] == '1' then
  -- HSET is first: without memory Redis refuses it, and would not refuse what follows a DEL.
  redis.call('HSET', KEYS[1], unpack(ARGV, 3))
  redis.call('HDEL', KEYS[1], 'at', 'count', 'done')
else
  old = ''
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local answer = redis.call('HGETALL', KEYS[1])
table.insert(answer, 1, old)
return answer
