-- Acquire. KEYS[1] record; ARGV fingerprint, attempt, lease ms, hold ms.
-- Replies ACQUIRED token | TAKEOVER token | BUSY token ms_left | REPLAY token record | MISMATCH state fp | CORRUPT.
-- Time and tokens come from the server: a token is its clock in microseconds, and never lower than the one it follows.
local v=redis.pcall('GET',KEYS[1])
if type(v)=='table' then return {'CORRUPT'} end
local t=redis.call('TIME')
local us=t[1]*1e6+t[2]
local ms=math.floor(us/1000)
local tok,code=us,'ACQUIRED'
if v then
  local st,fp,tk,a,b=string.match(v,'^([PC])|([^|]*)|(%d+)|([^|]*)|([^|\n]*)')
  if not st or (st=='P' and not tonumber(b)) then return {'CORRUPT'} end
  if fp~=ARGV[1] and (st=='C' or tonumber(b)>ms) then return {'MISMATCH',st,fp} end
  if st=='C' then return {'REPLAY',tk,v} end
  -- The client's own resend after a lost reply.
  if a==ARGV[2] then return {'ACQUIRED',tk} end
  if tonumber(b)>ms then return {'BUSY',tk,string.format('%.0f',b-ms)} end
  code='TAKEOVER'
  tok=math.max(us,tonumber(tk)+1)
end
redis.call('SET',KEYS[1],string.format('P|%s|%.0f|%s|%.0f',ARGV[1],tok,ARGV[2],ms+ARGV[3]),'PX',ARGV[4])
return {code,string.format('%.0f',tok)}
