-- Publish a result. KEYS[1] record; ARGV fingerprint, token, status, ref, payload, ttl ms.
-- Replies OK | DONE | MISMATCH.
-- It overwrites a pending record of any owner: only the holder of the one committed row may call this.
local v=redis.pcall('GET',KEYS[1])
if v and type(v)~='table' then
  local st,fp=string.match(v,'^(%u)|([^|]*)|')
  if st=='C' then return fp==ARGV[1] and 'DONE' or 'MISMATCH' end
end
redis.call('SET',KEYS[1],'C|'..ARGV[1]..'|'..ARGV[2]..'|'..ARGV[3]..'|'..ARGV[4]..'\n'..ARGV[5],'PX',ARGV[6])
return 'OK'
