--[[
What is past its time goes, a bounded part of one queue at a time.
]]

local MOST_TO_COME = 10000 -- tasks that wait for a time or for others, of which one purge learns the groups

local function purge_ended(q, name, upto, limit)
  local ids = call('ZRANGEBYSCORE', q.o .. name, '-inf', upto, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    call('DEL', q.o .. 'res:' .. id)
    call('ZREM', q.o .. name, id)
    if t and FINAL[t.state] then
      store.drop(t)
    elseif not t then
      call('ZREM', q.o .. 'tasks', id)
    end
  end
  return #ids
end

-- Other clients trim the list of completed jobs without knowing our books.
local function purge_trimmed(q, limit)
  local gone = 0
  for _, id in ipairs(call('ZRANGEBYSCORE', q.o .. 'done', 'inf', 'inf', 'LIMIT', 0, COMPLETED_KEEP + limit)) do
    if call('EXISTS', job_key(q, id)) == 0 then
      call('DEL', q.o .. 'res:' .. id)
      call('ZREM', q.o .. 'done', id)
      call('ZREM', q.o .. 'tasks', id)
      gone = gone + 1
    end
  end
  return gone
end

local function purge_dead(q, upto, limit)
  local ids = call('ZRANGEBYSCORE', q.base .. 'idx:failed', '-inf', upto, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    call('LREM', q.base .. 'failed', -1, id)
    if t and t.state == 'failed' then
      store.drop(t)
    else
      call('ZREM', q.base .. 'idx:failed', id)
    end
  end
  return #ids
end

local function purge_keys(q, limit)
  local gone = 0
  for _, key in ipairs(call('ZRANGEBYSCORE', q.o .. 'keys', '-inf', NOW, 'LIMIT', 0, limit)) do
    local found = store.key(q, key)
    local t = found and store.find(q, found.id)
    if not t or FINAL[t.state] then
      store.delete_key(q, key)
      gone = gone + 1
    else
      call('ZADD', q.o .. 'keys', digits(now + 3600000), key) -- its task lives on; look again later
    end
  end
  return gone
end

local function purge_events(q, op)
  local stream = q.o .. 'events'
  local found = call('HMGET', q.o .. 'meta', 'events', 'first')
  local last, first = number(found[1]), math.max(number(found[2]), 1)
  local edge = first - 1 -- the last number that goes
  if op.events_max then edge = math.max(edge, last - op.events_max) end
  local entries = call('XRANGE', stream, '-', '+', 'COUNT', op.limit)
  for _, entry in ipairs(op.events_before and entries or {}) do
    local upto = tonumber(string.match(entry[1], '^%d+'))
    if upto > edge then
      if cmsgpack.unpack(entry[2][2])[1] > op.events_before then break end -- a young one keeps those behind it
      edge = upto
    end
  end
  edge = math.min(edge, first - 1 + op.limit)
  if edge < first then return 0 end
  for _, entry in ipairs(entries) do
    if tonumber(string.match(entry[1], '^%d+')) <= edge then call('XDEL', stream, entry[1]) end
  end
  call('HSET', q.o .. 'meta', 'first', digits(edge + 1))
  return edge + 1 - first
end

-- The groups of the tasks that are in no lane yet; nothing if there are too many to look at.
local function groups_to_come(q)
  local members = {'delayed', 'o:blocked'}
  if call('ZCARD', q.base .. 'delayed') + call('ZCARD', q.o .. 'blocked') > MOST_TO_COME then return nil end
  local names = {}
  for _, set_name in ipairs(members) do
    for _, id in ipairs(call('ZRANGE', q.base .. set_name, 0, -1)) do
      local gid = machine.gid_of(q, id)
      if gid then names[gid] = true end
    end
  end
  return names
end

-- Groups without tasks go, those with a limit when they have been at rest since `limits_before`.
local function purge_lanes(q, op)
  local gone, to_come = 0, nil
  local cursor = call('HGET', q.o .. 'meta', 'lanes') or '-'
  local names = call('ZRANGEBYLEX', q.o .. 'lanes', cursor, '+', 'LIMIT', 0, op.limit)
  for _, gid in ipairs(names) do
    local base, rest = q.base .. 'g:' .. gid, q.o .. 'rest:' .. gid
    if call('EXISTS', base .. ':wait', base .. ':inflight') > 0 then
      call('DEL', rest) -- another client may have brought its tasks
    else
      if to_come == nil then to_come = groups_to_come(q) or false end
      local limited, since = call('EXISTS', base .. ':limit') == 1, call('GET', rest)
      if to_come and to_come[gid] then
        call('DEL', rest)
      elseif not limited or (to_come and since and op.limits_before and number(since) <= op.limits_before) then
        call('DEL', base .. ':limit', rest)
        gone = gone + call('ZREM', q.o .. 'lanes', gid)
      elseif not since then
        call('SET', rest, NOW)
      end
    end
  end
  call('HSET', q.o .. 'meta', 'lanes', #names == op.limit and '(' .. names[#names] or '-')
  return gone
end

-- What was put aside goes as dead letters do, which most of it is.
local function purge_corrupt(q, upto)
  local gone, entries = 0, call('HGETALL', q.o .. 'corrupt')
  for i = 1, #entries, 2 do
    if number(string.match(entries[i + 1], '^%d+')) <= upto then
      local id = entries[i]
      local t = is_text(id) and store.load(q, id)
      if not t then gone = gone + call('DEL', job_key(q, id)) end
      call('HDEL', q.o .. 'corrupt', id)
    end
  end
  return gone
end

-- Staged runs that are over, when their keys are.
local function purge_runs(q, limit)
  local ids = call('ZRANGEBYSCORE', q.o .. 'ended', '-inf', NOW, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    call('DEL', q.o .. 'run:' .. id, q.o .. 'rows:' .. id)
    call('ZREM', q.o .. 'ended', id)
  end
  return #ids
end

function upkeep.purge(op)
  local q = queue(op.queue)
  local upto = NOW
  local gone = 0
  for _, name in ipairs({'done', 'cancelled', 'results'}) do gone = gone + purge_ended(q, name, upto, op.limit) end
  gone = gone + purge_trimmed(q, op.limit)
  if op.dead_before then
    gone = gone + purge_dead(q, digits(op.dead_before), op.limit) + purge_corrupt(q, op.dead_before)
  end
  store.flush()
  return gone + purge_keys(q, op.limit) + purge_events(q, op) + purge_lanes(q, op) + purge_runs(q, op.limit)
end

-- Results that were stored before a moment, from the ids that the caller read.
function upkeep.forget(op)
  local q, gone = queue(op.queue), 0
  for _, id in ipairs(op.ids) do
    local found = call('GET', q.o .. 'res:' .. id)
    if found and tonumber(string.match(found, '^%d+ (%d+)')) < op.before then
      local t = store.load(q, id)
      call('DEL', q.o .. 'res:' .. id)
      call('ZREM', q.o .. 'results', id)
      if t and FINAL[t.state] then store.drop(t) end
      gone = gone + 1
    end
  end
  return gone
end
