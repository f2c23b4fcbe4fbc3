--[[
Lanes, groups and their slots, and the log of events.

A group is in `groups:ready` exactly if its lane has a task and fewer of its tasks run than its limit. `lanes.look` restores
that after every change; a group that opens, or stays open after a grant, goes to the back.
]]

local pending, groups, has_groups = {}, {}, {}
local changed_groups = {}

local function lane_key(t)
  if t.gid then return t.q.base .. 'g:' .. t.gid .. ':wait' end
  return t.q.base .. 'wait'
end

local function push_pending(key)
  local ids = pending[key]
  if ids then
    pending[key] = nil
    in_parts('RPUSH', key, ids)
  end
end

function lanes.push(key, id)
  local ids = pending[key]
  if ids then
    ids[#ids + 1] = id
  else
    pending[key] = {id}
  end
end

function lanes.group(q, gid)
  local name = q.name .. '\0' .. gid
  local g = groups[name]
  if not g then
    local base = q.base .. 'g:' .. gid
    local found = call('MGET', base .. ':limit', base .. ':inflight', q.o .. 'rest:' .. gid)
    g = {q = q, gid = gid, base = base, limit = number(found[1]), inflight = math.max(number(found[2]), 0), rests = found[3]}
    -- read anew in each call: other clients push, pop and release too
    g.ready = call('LLEN', base .. ':wait') + #(pending[base .. ':wait'] or {})
    g.open = call('ZSCORE', q.base .. 'groups:ready', gid) and true or false
    g.was_open, g.was_inflight = g.open, g.inflight
    groups[name] = g
  end
  return g
end

local function is_open(g)
  return g.ready > 0 and g.inflight < math.max(g.limit, 1)
end

function lanes.look(g)
  local open = is_open(g)
  if open and not g.open then
    g.score = next_turn(g.q)
    ready_queues[g.q.name] = true
  end
  g.open = open
  if not g.changed then
    g.changed, changed_groups[#changed_groups + 1] = true, g
  end
end

function lanes.write(g)
  local ready = g.q.base .. 'groups:ready'
  if g.rests then call('DEL', g.q.o .. 'rest:' .. g.gid) end
  g.rests = nil
  if g.open and g.score then
    call('ZADD', ready, string.format('%.17g', g.score), g.gid)
    g.q.changed = true
  elseif g.was_open and not g.open then
    call('ZREM', ready, g.gid)
    g.q.changed = true
  end
  g.score, g.was_open = nil, g.open
  if g.inflight ~= g.was_inflight then
    -- an absent number reads as 0 everywhere, and groups come by the thousand
    if g.inflight > 0 then call('SET', g.base .. ':inflight', g.inflight) else call('DEL', g.base .. ':inflight') end
    g.was_inflight = g.inflight
  end
  g.changed = false
end

function lanes.push_all()
  for key in pairs(pending) do push_pending(key) end
  local list = changed_groups
  changed_groups = {}
  for _, g in ipairs(list) do
    if g.changed then lanes.write(g) end
  end
end

function lanes.set_limit(g, limit)
  g.limit = limit
  call('SET', g.base .. ':limit', limit)
  g.q.lanes[g.gid] = true
  lanes.look(g)
end

-- Out of the lane, or out of the slot, that the task's state gives it.
function lanes.leave(t)
  local g = t.gid and lanes.group(t.q, t.gid) -- before the lane changes: it counts the lane
  if t.state == 'wait' then
    push_pending(lane_key(t))
    call('LREM', lane_key(t), 1, t.id)
    if g then g.ready, t.q.grouped = math.max(g.ready - 1, 0), t.q.grouped - 1 end
  elseif t.state == 'active' and g then
    g.inflight = math.max(g.inflight - 1, 0)
  end
end

local function enter(t, at_head)
  local g = t.gid and lanes.group(t.q, t.gid)
  if t.state == 'wait' then
    local key = lane_key(t)
    if at_head then
      call('LPUSH', key, t.id)
    else
      lanes.push(key, t.id)
    end
    if g then g.ready, t.q.grouped = g.ready + 1, t.q.grouped + 1 end
    ready_queues[t.q.name] = true
  elseif t.state == 'active' and g then
    g.inflight = g.inflight + 1
  end
end

-- `at_head`: before all tasks of the lane that were never leased.
function lanes.move(t, state, at_head)
  lanes.leave(t)
  if t.state and (state == 'wait' or state == 'delayed') and t.state ~= 'delayed' then set(t, 'more', '1') end
  t.state, t.moved = state, true
  set(t, 'state', state)
  enter(t, at_head)
  if t.gid then lanes.look(lanes.group(t.q, t.gid)) end
end

-- Who has just been popped from a lane.
function lanes.take(t)
  if t.gid then
    local g = lanes.group(t.q, t.gid)
    g.ready, t.q.grouped = math.max(g.ready - 1, 0), t.q.grouped - 1
    g.inflight = g.inflight + 1
    g.open = false
    lanes.look(g)
  end
  t.state, t.moved = 'active', true
  set(t, 'state', 'active')
end

function lanes.grouped(q)
  if has_groups[q.name] == nil then has_groups[q.name] = call('EXISTS', q.base .. 'has_groups') == 1 end
  return has_groups[q.name]
end

function lanes.mark_grouped(q, gid)
  if not lanes.grouped(q) then
    call('SET', q.base .. 'has_groups', '1')
    has_groups[q.name] = true
  end
  q.lanes[gid] = true
end

-- -- events ----------------------------------------------------------------------------------------

-- Ten values per event, in one flat list: fewer tables.
function log.add(q, event, id, name, gid, attempt, worker, created_ms, due_ms, code, data)
  local events = q.events
  local n = #events
  events[n + 1], events[n + 2], events[n + 3], events[n + 4], events[n + 5] = event, id, name, gid, attempt
  events[n + 6], events[n + 7], events[n + 8], events[n + 9], events[n + 10] = worker, created_ms, due_ms, code, data
end

function log.note(t, event, data, state)
  if not request.events then return end
  log.add(t.q, event, t.id, t.name or '*', t.gid or false, t.attempt, t.worker or false, t.created_ms, t.due_ms,
          CODE[state or t.state], data or false)
end

function log.write(q)
  if #q.events == 0 then return end
  meta(q)
  q.last_event = q.last_event + #q.events / 10
  q.changed_meta = true
  call('XADD', q.o .. 'events', digits(q.last_event) .. '-0', 'e', cmsgpack.pack({now, q.events}))
end

-- `{"a":1}` and more: the pieces are JSON already.
function log.with(data, key, value)
  local pair = '"' .. key .. '":' .. value
  if not data or data == '{}' then return '{' .. pair .. '}' end
  return string.sub(data, 1, -2) .. ',' .. pair .. '}'
end

-- An event carries the kind and the first words of an error; the whole stands on the task.
function log.brief(failure)
  local parsed, body = pcall(cjson.decode, failure)
  if not parsed or type(body) ~= 'table' then body = {} end -- another client wrote it
  local kind, message = body.type, body.message
  if type(kind) ~= 'string' then kind = '' end
  if type(message) ~= 'string' then message = '' end
  if #message > 500 then
    local cut = 500
    while cut > 0 and string.byte(message, cut + 1) >= 128 and string.byte(message, cut + 1) < 192 do cut = cut - 1 end
    message = string.sub(message, 1, cut)
  end
  return '{"type":' .. cjson.encode(kind) .. ',"message":' .. cjson.encode(message) .. '}'
end
