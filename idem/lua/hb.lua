-- Heartbeat. KEYS[1] record; ARGV token, lease ms. Replies OK | LOST | GONE.
local v=redis.pcall('GET',KEYS[1])
if type(v)=='table' then return 'LOST' end
if not v then return 'GONE' end
local st,fp,tk,a=string.match(v,'^(%u)|([^|]*)|(%d+)|([^|]*)|')
if st~='P' or tk~=ARGV[1] then return 'LOST' end
local t=redis.call('TIME')
local ms=math.floor((t[1]*1e6+t[2])/1000)
redis.call('SET',KEYS[1],string.format('P|%s|%s|%s|%.0f',fp,tk,a,ms+ARGV[2]),'KEEPTTL')
return 'OK'
