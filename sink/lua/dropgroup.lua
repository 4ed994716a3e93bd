-- Destroys a consumer group and the lease of its ordered mode, unless a consumer reads for it.
-- KEYS stream, lease. ARGV group, ms within which a sign of life counts, "look" (only answer), "drop" or "force"
-- Answers {GONE}, {ACTIVE, consumer, ms}, {LEASED, consumer}, {UNSURE, consumers} or {OK}.
local stream, name, how = KEYS[1], ARGV[1], ARGV[3]

if redis.call('EXISTS', stream) == 0 then return {'GONE'} end
local s = fields(redis.call('XINFO', 'STREAM', stream))
local g
for _, list in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local f = fields(list)
  if f['name'] == name then g = f end
end
if not g then return {'GONE'} end

if how ~= 'force' then
  local holder = redis.call('GET', KEYS[2])
  if holder then return {'LEASED', string.match(holder, '^(.*)|%x+|%d+$') or holder} end
  local sure = true
  for _, list in ipairs(redis.call('XINFO', 'CONSUMERS', stream, name)) do
    local c = fields(list)
    if c['idle'] < tonumber(ARGV[2]) then return {'ACTIVE', c['name'], c['idle']} end
    sure = sure and c['inactive'] ~= nil
  end
  -- A server without "inactive" does not notice a consumer that waits for entries.
  local idle = g['pending'] == 0 and g['last-delivered-id'] == s['last-generated-id']
  if not sure and idle then return {'UNSURE', g['consumers']} end
end
if how == 'look' then return {'OK'} end
redis.call('XGROUP', 'DESTROY', stream, name)
redis.call('DEL', KEYS[2])
return {'OK'}
