-- Notes that a leader is alive, unless another one is: one that is neither the caller's process nor of its server of
-- Postgres.
-- KEYS sign
-- ARGV process, server, holder, how long a sign counts in ms, how long it counts if it is renewed while another leader
--      waits, what the caller has seen before, '' for nothing
-- Answers {}, or {process, server, holder, text} of the other one.
local text = redis.call('GET', KEYS[1])
if text then
  local process, server, holder = string.match(text, '^([^|]*)|([^|]*)|[^|]*|(.*)$')
  if process and process ~= ARGV[1] and server ~= ARGV[2] then
    if ARGV[6] ~= '' and ARGV[6] ~= text then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
    return {process, server, holder, text}
  end
end
local t = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. ARGV[2] .. '|' .. t[1] .. '.' .. t[2] .. '|' .. ARGV[3], 'PX', ARGV[4])
return {}
