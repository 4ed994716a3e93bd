-- Release. KEYS[1] record; ARGV token. Replies OK | NOT_OWNER | GONE. Only the pending record of that token goes.
local v=redis.pcall('GET',KEYS[1])
if type(v)=='table' then return 'NOT_OWNER' end
if not v then return 'GONE' end
local st,tk=string.match(v,'^(%u)|[^|]*|(%d+)|')
if st=='P' and tk==ARGV[1] then
  redis.call('DEL',KEYS[1])
  return 'OK'
end
return 'NOT_OWNER'
